"""kvstrata: hierarchical KV-cache storage and offload for LLM engines."""
