"""What only shows on an emulated cluster: hosts behind slow links."""
