"""Answers: response bodies as JSON and as binary."""
