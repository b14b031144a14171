"""Hosts that load and run whole models. Importing a module of this package is what registers it."""
