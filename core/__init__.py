"""The vocabulary: values, identity, configuration. Standard library only; imports nothing of kvstrata above it."""
