"""Tables, plots, the comparison's page and the model card: figures as people see them.

No figure is computed here. Start with `columns.py`.
"""
