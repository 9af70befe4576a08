//! Statements that write to `orders`: directly, through views, rules, functions, triggers, cursors and MERGE.

/// The views, rules, functions and triggers that these statements go through.
pub const VIEWS_AND_FUNCTIONS: &str = "
    CREATE TABLE feed (id int, v int); INSERT INTO feed VALUES (1, 7);
    CREATE VIEW orders_view AS SELECT id, v, fence FROM orders WHERE id > 0 WITH CHECK OPTION;
    CREATE VIEW orders_view_of_view AS SELECT fence AS f, id, v AS w FROM orders_view;
    CREATE FUNCTION instead() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'UPDATE' THEN UPDATE orders SET v = NEW.v, fence = NEW.fence WHERE id = OLD.id; RETURN NEW;
        ELSIF TG_OP = 'DELETE' THEN DELETE FROM orders WHERE id = OLD.id; RETURN OLD;
        ELSE INSERT INTO orders VALUES (NEW.*); RETURN NEW; END IF; END $$;
    CREATE VIEW orders_instead AS SELECT * FROM orders;
    CREATE TRIGGER instead INSTEAD OF INSERT OR UPDATE OR DELETE ON orders_instead
        FOR EACH ROW EXECUTE FUNCTION instead();
    CREATE VIEW orders_ruled AS SELECT * FROM orders;
    CREATE RULE ruled_u AS ON UPDATE TO orders_ruled DO INSTEAD
        UPDATE orders SET v = NEW.v, fence = NEW.fence WHERE id = OLD.id;
    CREATE RULE ruled_d AS ON DELETE TO orders_ruled DO INSTEAD DELETE FROM orders WHERE id = OLD.id;
    CREATE RULE ruled_i AS ON INSERT TO orders_ruled DO INSTEAD INSERT INTO orders VALUES (NEW.*);
    CREATE TABLE ticks (n int);
    CREATE RULE also AS ON INSERT TO ticks DO ALSO UPDATE orders SET v = NEW.n WHERE id = 1;
    CREATE TABLE bells (n int, f bigint);
    CREATE FUNCTION ring() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        UPDATE orders SET v = NEW.n, fence = coalesce(NEW.f, fence) WHERE id = 1; RETURN NULL; END $$;
    CREATE TRIGGER ring AFTER INSERT ON bells FOR EACH ROW EXECUTE FUNCTION ring();
    CREATE FUNCTION pay(t bigint) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
        UPDATE orders SET v = 7, fence = t WHERE id = 1; END $$;
    CREATE FUNCTION pay_sql(t bigint) RETURNS void LANGUAGE sql AS $$
        UPDATE orders SET v = 7, fence = t WHERE id = 1 $$;
    CREATE FUNCTION pay_definer(t bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
        SET search_path = public AS $$ BEGIN
        EXECUTE format('UPDATE orders SET v = 7, fence = %s WHERE id = 1', t); END $$;
    CREATE PROCEDURE pay_call(t bigint) LANGUAGE plpgsql AS $$ BEGIN
        UPDATE orders SET v = 7, fence = t WHERE id = 1; END $$;
    CREATE FUNCTION touch() RETURNS void LANGUAGE plpgsql AS $$ BEGIN
        UPDATE orders SET v = 7 WHERE id = 1; END $$;
    CREATE FUNCTION touch_definer() RETURNS void LANGUAGE sql SECURITY DEFINER
        SET search_path = public AS $$ UPDATE orders SET v = 7 WHERE id = 1 $$;
    CREATE FUNCTION wipe() RETURNS void LANGUAGE plpgsql SECURITY DEFINER
        SET search_path = public AS $$ BEGIN DELETE FROM orders WHERE id = 1; END $$;
";

/// Updates that set `v` to 7 and the fence column to `{t}`.
pub const UPDATES: &[&str] = &[
    "UPDATE orders SET v = 7, fence = {t} WHERE id = 1",
    "UPDATE ONLY orders SET (v, fence) = (SELECT 7, {t}::bigint) WHERE id = 1 RETURNING *",
    "UPDATE orders o SET v = f.v, fence = {t} FROM feed f WHERE f.id = o.id",
    "UPDATE orders_view SET v = 7, fence = {t} WHERE id = 1",
    "UPDATE orders_view_of_view SET w = 7, f = {t}",
    "UPDATE orders_instead SET v = 7, fence = {t} WHERE id = 1",
    "UPDATE orders_ruled SET v = 7, fence = {t} WHERE id = 1",
    "INSERT INTO orders VALUES (1, 7, {t}) ON CONFLICT (id) DO UPDATE SET v = 7, fence = {t}",
    "INSERT INTO orders VALUES (1, 7, {t}) ON CONFLICT (id) DO UPDATE SET v = excluded.v, fence = excluded.fence",
    "INSERT INTO orders_view VALUES (1, 7, {t}) ON CONFLICT (id) DO UPDATE SET v = 7, fence = {t}",
    "MERGE INTO orders USING feed f ON f.id = orders.id WHEN MATCHED THEN UPDATE SET v = f.v, fence = {t}",
    "WITH w AS (UPDATE orders SET v = 7, fence = {t} WHERE id = 1 RETURNING *) SELECT count(*) FROM w",
    "DEALLOCATE ALL; PREPARE p (bigint) AS UPDATE orders SET v = 7, fence = $1 WHERE id = 1; EXECUTE p ({t})",
    "SELECT pay({t})",
    "SELECT pay_sql({t})",
    "SELECT pay_definer({t})",
    "CALL pay_call({t})",
    "DO $$ BEGIN EXECUTE 'UPDATE orders SET v = 7, fence = {t} WHERE id = 1'; END $$",
    "INSERT INTO bells VALUES (7, {t})",
    "DECLARE c CURSOR FOR SELECT * FROM orders WHERE id = 1 FOR UPDATE; FETCH c; \
     UPDATE orders SET v = 7, fence = {t} WHERE CURRENT OF c",
];

/// Updates that do not name the fence column.
pub const TOUCHES: &[&str] = &[
    "UPDATE orders SET v = 7 WHERE id = 1",
    "UPDATE orders SET v = 7",
    "UPDATE orders o SET v = f.v FROM feed f WHERE f.id = o.id",
    "UPDATE orders_view SET v = 7 WHERE id = 1",
    "UPDATE orders_view_of_view SET w = 7",
    "MERGE INTO orders USING feed f ON f.id = orders.id WHEN MATCHED THEN UPDATE SET v = f.v",
    "WITH w AS (UPDATE orders SET v = 7 WHERE id = 1 RETURNING *) SELECT count(*) FROM w",
    "DEALLOCATE ALL; PREPARE p (int) AS UPDATE orders SET v = $1 WHERE id = 1; EXECUTE p (7)",
    "SELECT touch()",
    "SELECT touch_definer()",
    "INSERT INTO ticks VALUES (7)",
    "DO $$ BEGIN UPDATE orders SET v = 7; END $$",
    "DECLARE c CURSOR FOR SELECT * FROM orders WHERE id = 1 FOR UPDATE; FETCH c; \
     UPDATE orders SET v = 7 WHERE CURRENT OF c",
];

/// Deletes of row 1.
pub const DELETES: &[&str] = &[
    "DELETE FROM orders WHERE id = 1",
    "DELETE FROM ONLY orders RETURNING *",
    "DELETE FROM orders o USING feed f WHERE f.id = o.id",
    "DELETE FROM orders_view",
    "DELETE FROM orders_view_of_view",
    "DELETE FROM orders_instead WHERE id = 1",
    "DELETE FROM orders_ruled WHERE id = 1",
    "MERGE INTO orders USING feed f ON f.id = orders.id WHEN MATCHED THEN DELETE",
    "WITH w AS (DELETE FROM orders RETURNING *) SELECT count(*) FROM w",
    "DEALLOCATE ALL; PREPARE p AS DELETE FROM orders WHERE id = 1; EXECUTE p",
    "SELECT wipe()",
    "DECLARE c CURSOR FOR SELECT * FROM orders WHERE id = 1 FOR UPDATE; FETCH c; \
     DELETE FROM orders WHERE CURRENT OF c",
];

/// Inserts of a row 2 with the fence `{t}`, which may be NULL.
pub const INSERTS: &[&str] = &[
    "INSERT INTO orders VALUES (2, 7, {t})",
    "INSERT INTO orders SELECT 2, v, {t}::bigint FROM feed",
    "INSERT INTO orders VALUES (2, 7, {t}) ON CONFLICT DO NOTHING",
    "INSERT INTO orders_view VALUES (2, 7, {t})",
    "INSERT INTO orders_view_of_view VALUES ({t}, 2, 7)",
    "INSERT INTO orders_instead VALUES (2, 7, {t})",
    "INSERT INTO orders_ruled VALUES (2, 7, {t})",
    "MERGE INTO orders USING (VALUES (2, 7)) AS s (id, v) ON s.id = orders.id \
     WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.v, {t})",
    "WITH w AS (INSERT INTO orders VALUES (2, 7, {t}) RETURNING *) SELECT count(*) FROM w",
    "DEALLOCATE ALL; PREPARE p (bigint) AS INSERT INTO orders VALUES (2, 7, $1); EXECUTE p ({t})",
];
