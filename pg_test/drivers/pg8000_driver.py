import os, pg8000.dbapi

db = pg8000.dbapi.connect("app", host="127.0.0.1", port=int(os.environ["PGPORT"]), database="postgres")
cursor = db.cursor()
cursor.execute("SELECT lease_acquire('order:7', 'pg8000')")
print("lost is", cursor.fetchone()[0])
print("begins by itself:", db._transaction_status != b"I")
try:
    cursor.execute("UPDATE orders SET status = 'late'")
except pg8000.dbapi.Error as error:
    print("refused", error.args[0]["C"], "detail" if "orders" in error.args[0]["D"] else "no detail")
db.rollback()
cursor.execute("UPDATE notes SET text = 'lost'")
try:
    cursor.execute("SELECT 1 / 0")
except pg8000.dbapi.Error:
    pass
try:
    db.commit()
    print("commit is silent")
except pg8000.dbapi.Error:
    print("commit tells")
