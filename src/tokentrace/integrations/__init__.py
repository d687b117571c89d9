"""Doors into trainers and libraries, a module for each."""
