"""What a site's processes let know: in their logs, and in memory they share."""
