import os, psycopg2

db = psycopg2.connect(os.environ["DATABASE_URL"])
cursor = db.cursor()
cursor.execute("SELECT lease_acquire('order:7', 'psycopg2')")
print("lost is", cursor.fetchone()[0])
print("begins by itself:", db.info.transaction_status == psycopg2.extensions.TRANSACTION_STATUS_INTRANS)
try:
    cursor.execute("UPDATE orders SET status = 'late'")
except psycopg2.Error as error:
    print("refused", error.pgcode, "detail" if "orders" in error.diag.message_detail else "no detail")
db.rollback()
cursor.execute("UPDATE notes SET text = 'lost'")
try:
    cursor.execute("SELECT 1 / 0")
except psycopg2.Error:
    pass
db.commit()
print("commit is silent")
