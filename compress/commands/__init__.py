"""The command line: each verb's file builds its options, calls it and prints its figures.

Options are made from the dataclasses that declare them (`click_options.py`); code that all commands share is in
`command.py`. Files here import neither torch nor a verb at module level, so that help texts appear at once. Start with
`quantize.py`.
"""
