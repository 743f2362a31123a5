"""Shardy's and XLA's word on a planned step: which collectives will run.

`audit.audit` asks Shardy before compiling, `hlo.hlo_collectives` reads what the compiler made;
`normal_form` is the form in which both, and a plan's own prediction, are compared.
"""
