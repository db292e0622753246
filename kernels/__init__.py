"""Gather and scatter between paged pools and packed records; plain pages and ids, never tiers."""
