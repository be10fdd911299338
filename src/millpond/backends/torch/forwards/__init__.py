"""Packed forward passes of the families, and what they share."""
