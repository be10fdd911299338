"""Input: a caller's arguments checked, resolved into a plan, and turned into token ids."""
