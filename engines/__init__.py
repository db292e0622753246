"""Adapters for LLM engines."""
