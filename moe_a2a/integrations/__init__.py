"""Integrations with other libraries. Each file imports its library: import the one you need."""
