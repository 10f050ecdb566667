"""Everything that a forward touches besides its arguments."""
