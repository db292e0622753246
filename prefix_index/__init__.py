"""Which blocks a prefix names: a radix tree over symbols. Decides nothing, holds no KV."""
