from django.db import migrations, models, transaction

from pg_fence import NoToken, classify
from pg_fence.testing import unfenced


def fill(apps, schema_editor):
    Order = apps.get_model("shop", "Order")
    connection = schema_editor.connection
    customer = apps.get_model("shop", "Customer").objects.create(name="of the migration")
    with unfenced(connection, "orders"):
        Order.objects.create(customer=customer, status="old")
    # No lease is held here, so an update of all rows is refused...
    try:
        with transaction.atomic():
            Order.objects.update(status="filled")
    except Exception as error:
        assert isinstance(classify(error), NoToken), error
    else:
        raise AssertionError("the fence let it through")
    # ...and goes through where the fence is off.
    with unfenced(connection, "orders"):
        assert Order.objects.update(status="filled") == 1
        Order.objects.all().delete()
    customer.delete()


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.RunPython(fill)]
