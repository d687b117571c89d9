"""Doors into the trainers and libraries that people have: one module for each, imported by its own name.

Each needs the package that it is named after; nothing here is imported by the rest of tokentrace.
"""
