"""`headway bench profile`: one request at a time, where its time goes, and what the machine would allow."""
