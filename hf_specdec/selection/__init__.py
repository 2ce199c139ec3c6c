"""Which draft, and where it lives."""
