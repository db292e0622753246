"""Moves bytes between tiers and decides nothing."""
