"""The command line, one file for each verb: it builds the verb's options, calls it and prints its figures.

Options are made from the dataclasses that declare them (`click_options.py`); what all commands share is in `command.py`.
Files here import neither torch nor a verb at their top, so that help texts appear at once. Start with `quantize.py`.
"""
