"""Leaves that connect anyfp8 with one library each; import the one you need."""
