"""Tests against engines that are really there."""
