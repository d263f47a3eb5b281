"""What the handlers write."""

from django.db import models


class Invoice(models.Model):
    """One for each order."""

    order = models.IntegerField()
    once = models.IntegerField(unique=True, null=True)
