"""Tests of ope_gym."""
