"""Which blocks a prefix names: a radix tree over fixed-width symbols. Decides nothing, holds no bytes."""
