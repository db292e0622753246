"""Decides: the only writer of the index and of the ledgers."""
