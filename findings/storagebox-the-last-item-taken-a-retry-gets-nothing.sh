#!/bin/bash
# storagebox 1.0.7 (PyPI, "idempotent and exactly once" handing out of items): once the bank is empty a retry gets None.
#
# Guess: whoever asks again with the same deduplication id is handed the same item, always: that is what the id is for,
#   and the item is noted with it. None is the answer to a new id when nothing is left.
# Seen: a new item is drawn before the id is looked at. When the last one is gone, all who got theirs, and ask again
#   because the answer was lost on its way, are told None, as if they had none.
. "$(dirname "$0")/lib.sh"
pip_install storagebox==1.0.7 'moto[server,dynamodb]==5.1.4' boto3==1.38.27
dynamodb bank item:S
dynamodb given deduplication_id:S
python > "$work/seen" <<'END' || true
import boto3, storagebox
bank = storagebox.Deduplicator(
    item_repo=storagebox.ItemBankDynamoDbRepository(table_name="bank"),
    deduplication_repo=storagebox.DeduplicationDynamoDbRepository(table_name="given"))
bank.add_items_to_bank(["coupon 1", "coupon 2"])
def ask(who):
    return bank.fetch_item_for_deduplication_id(deduplication_id=who)
anna = ask("Anna")
print("Anna asks again, one coupon left: the same one:", ask("Anna") == anna)
bert = ask("Bert")
print("Bert has the other one:", sorted([anna, bert]) == ["coupon 1", "coupon 2"])
print("Anna asks again, none left:", ask("Anna"))
print("Bert asks again, none left:", ask("Bert"))
given = {row["deduplication_id"]: row["item_string"] for row in boto3.resource("dynamodb").Table("given").scan()["Items"]}
print("in the table they still have theirs:", given == {"Anna": anna, "Bert": bert})
END
still <<'END'
Anna asks again, one coupon left: the same one: True
Bert has the other one: True
Anna asks again, none left: None
Bert asks again, none left: None
in the table they still have theirs: True
END
