"""Everything a forward reads or writes besides its arguments."""
