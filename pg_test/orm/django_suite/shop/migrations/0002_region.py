from django.db import migrations, models, transaction

from shop.unfenced import unfenced


def fill(apps, schema_editor):
    Order = apps.get_model("shop", "Order")
    customer = apps.get_model("shop", "Customer").objects.create(name="of the migration")
    with unfenced():
        Order.objects.create(customer=customer, status="old")
    # No lease is held here, so an update of all rows is refused...
    try:
        with transaction.atomic():
            Order.objects.update(status="filled")
    except Exception as error:
        assert error.__cause__.sqlstate == "PF002", error
    else:
        raise AssertionError("the fence let it through")
    # ...and goes through where the fence is off.
    with unfenced():
        assert Order.objects.update(status="filled") == 1
        Order.objects.all().delete()
    customer.delete()


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.RunPython(fill)]
