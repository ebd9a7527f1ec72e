"""The site: pages are complete, their code runs, links lead somewhere, figures are those of the records."""
