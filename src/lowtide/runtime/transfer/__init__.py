"""Values to a lower tier, and back."""
