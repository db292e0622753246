"""The vocabulary: values, identity, configuration. Standard library only, and the ground floor."""
