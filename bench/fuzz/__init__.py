"""Generated requests against a served stack: nothing may fail inside, hang, or be refused in a form of its own."""
