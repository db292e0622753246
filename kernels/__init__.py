"""Gather and scatter between paged pools and packed buffers. They take plain pages and index arrays, never tiers."""
