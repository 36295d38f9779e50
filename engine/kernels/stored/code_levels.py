"""The numbers that codes of four bits stand for. This module does not need torch or Numba."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes in E2M1: numbers with a sign, two bits of exponent and one bit of mantissa (OCP Microscaling Formats v1.0)."""
DOUBLED = tuple(int(2 * sign * size) for sign in (1, -1) for size in MAGNITUDES)
"""Twice the number of each code of E2M1, an integer. The highest bit of a code is the sign."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of GGUF's types IQ4_NL and IQ4_XS."""
