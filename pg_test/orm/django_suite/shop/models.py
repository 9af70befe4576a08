from django.db import models


class Customer(models.Model):
    name = models.TextField()


class Order(models.Model):
    """Knows nothing of its fence."""

    customer = models.ForeignKey(Customer, on_delete=models.PROTECT)
    status = models.TextField(default="new")
    version = models.IntegerField(default=1)

    class Meta:
        db_table = "orders"
