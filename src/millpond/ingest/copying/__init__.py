"""Copying: the rows of a collection written to another one, of any database, without computing anything."""
