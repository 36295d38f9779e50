"""Presentation of figures: tables, plots, the comparison's page and the model card.

No figure is computed here. Start with `columns.py`.
"""
