"""One benchmark a file."""
