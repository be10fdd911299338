"""Sinks: what a database must offer, and what the databases share."""
