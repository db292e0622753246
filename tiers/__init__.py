"""What holds bytes, and the ledgers that say who is where. A tier never decides."""
