"""Pure policies: values in, values out. They see kvstrata.core and nothing else."""
