"""From stored runs to the paper's tables, figures and claims."""
