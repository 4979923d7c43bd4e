"""``hocket doctor``: looks at machines and what is between them, and says what is wrong and how to put it right."""
