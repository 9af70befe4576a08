//! `fence_audit` on what hangs together: partitions and inheritance children.

use crate::support::holes::{AuditedDatabase, Hole, BOUND, HOLE, LANDS};
use pg_test::{lab_test, Lab, Result};

const TABLE: &str = "
    CREATE TABLE orders (id int NOT NULL, v int, fence bigint, region text DEFAULT 'eu') PARTITION BY LIST (region);
    CREATE TABLE eu PARTITION OF orders FOR VALUES IN ('eu');
    CREATE TABLE far PARTITION OF orders FOR VALUES IN ('us', 'asia') PARTITION BY LIST (region);
    CREATE TABLE us PARTITION OF far FOR VALUES IN ('us')";
const TREE: Hole<'static> = Hole { table: TABLE, ..HOLE };

#[lab_test]
fn a_partition_whose_trigger_does_not_fire_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "ALTER TABLE eu DISABLE TRIGGER fenced",
            found: &[r#"eu|hole|trigger "fenced" is disabled"#],
            ..TREE
        },
        Hole {
            fence: ", always => true",
            built: "ALTER TABLE eu ENABLE REPLICA TRIGGER fenced",
            found: &[r#"eu|hole|trigger "fenced" fires for apply workers only"#],
            ..TREE
        },
        Hole {
            built: "ALTER TABLE orders DISABLE TRIGGER fenced",
            found: &[r#"orders|hole|trigger "fenced" is disabled"#],
            ..TREE
        },
        Hole {
            built:
                "ALTER TABLE eu DISABLE TRIGGER fenced_truncate; GRANT TRUNCATE ON eu TO :writer",
            found: &[
                r#"eu|hole|trigger "fenced_truncate" is disabled"#,
                "eu|notice|:writer may TRUNCATE; only the trigger stands in the way",
            ],
            write: "TRUNCATE eu",
            after: "42501",
            ..TREE
        },
    ])
}

#[lab_test]
fn a_new_partition_is_found(lab: &Lab) -> Result<()> {
    // Postgres gives it the row triggers of its root; a statement trigger it cannot give.
    let hole = Hole {
        fence: "",
        found: &[
            "asia|notice|TRUNCATE not fenced",
            "asia|hole|:writer may TRUNCATE; nothing stands in the way",
        ],
        write: "TRUNCATE asia",
        after: "42501",
        ..TREE
    };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "CREATE TABLE asia PARTITION OF orders FOR VALUES IN ('as'); \
                    INSERT INTO asia VALUES (2, 0, NULL, 'as'); GRANT TRUNCATE ON asia TO :writer",
            ..hole
        },
        Hole {
            built: "CREATE TABLE asia (LIKE orders); INSERT INTO asia VALUES (2, 0, NULL, 'as'); \
                    ALTER TABLE orders ATTACH PARTITION asia FOR VALUES IN ('as'); GRANT TRUNCATE ON asia TO :writer",
            ..hole
        },
        Hole {
            built: "CREATE TABLE asia PARTITION OF far FOR VALUES IN ('asia')",
            found: &["asia|notice|TRUNCATE not fenced"],
            write: "UPDATE orders SET v = 33",
            before: "PF002",
            after: "PF002",
            ..hole
        },
        // One that was fenced by itself: its own fence has to go first.
        Hole {
            fence: BOUND,
            built: "CREATE TABLE asia (LIKE orders); INSERT INTO asia VALUES (2, 0, NULL, 'as'); \
                    SELECT fence_protect('asia', lease => 'order:{id}'); \
                    BEGIN; SELECT fence_unprotect('asia'); \
                    ALTER TABLE orders ATTACH PARTITION asia FOR VALUES IN ('as'); COMMIT",
            found: &["asia|notice|TRUNCATE not fenced"],
            write: "UPDATE asia SET v = 33, fence = :old",
            before: "PF004",
            after: "PF004",
            ..hole
        },
    ])?;
    let mut audited = AuditedDatabase::new(lab)?;
    audited.stage(TABLE, BOUND)?;
    audited.owner.run("CREATE TABLE asia (LIKE orders); SELECT fence_protect('asia')")?;
    audited
        .owner
        .refused("ALTER TABLE orders ATTACH PARTITION asia FOR VALUES IN ('as')", "42710")?;
    Ok(())
}

#[lab_test]
fn a_partition_that_differs_from_its_root_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            fence: ", events => 'insert,update,delete,truncate'",
            built: "ALTER TABLE eu ALTER fence SET DEFAULT :old",
            found: &[r#"eu|hole|the fence column "fence" has a default, which passes for a token"#],
            write: "INSERT INTO eu (id, v) VALUES (2, 33)",
            after: "PF002",
            ..TREE
        },
        Hole {
            built: "ALTER TABLE eu SET UNLOGGED",
            found: &["eu|hole|this table is unlogged: a crash empties it, fences and all"],
            before: "PF001",
            ..TREE
        },
    ])
}

#[lab_test]
fn a_later_trigger_of_a_partition_is_found(lab: &Lab) -> Result<()> {
    let low = |table: &str| {
        format!(
            "CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                 'BEGIN NEW.fence := :old; RETURN NEW; END'; \
             CREATE TRIGGER zz BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION low()"
        )
    };
    let mut audited = AuditedDatabase::new(lab)?;
    for fence in ["", BOUND] {
        for table in ["orders", "eu"] {
            let later = format!(
                r#"{table}|hole|trigger "zz" runs after the fence and may change what it has judged"#
            );
            // Of a row that moves, the place where the row comes to must be fenced, too.
            let found = if fence.is_empty() {
                &["orders|hole|INSERT not fenced", &later][..]
            } else {
                &[&*later]
            };
            audited.close_all(&[Hole {
                fence,
                built: &low(table),
                found,
                write: "UPDATE orders SET v = 35, fence = lease_renew('order:1', :new)",
                ..TREE
            }])?;
        }
    }
    // The same for a row that moves.
    audited.close_all(&[Hole {
        fence: ", events => 'insert,update,delete,truncate'",
        built: &low("orders"),
        found: &[
            r#"orders|hole|trigger "zz" runs after the fence and may change what it has judged"#,
        ],
        write: "UPDATE orders SET region = 'us', fence = lease_renew('order:1', :new)",
        ..TREE
    }])
}

#[lab_test]
fn a_detached_partition_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "ALTER TABLE orders DETACH PARTITION eu",
            found: &[
                "eu|hole|not fenced, with the very columns of s.orders: a detached partition?",
            ],
            found_in_all: Some(&["eu|hole|INSERT, UPDATE, DELETE not fenced"]),
            write: "UPDATE eu SET v = 33, fence = :old",
            ..TREE
        },
        Hole {
            built: "ALTER TABLE orders DETACH PARTITION eu; SELECT fence_unprotect('eu')",
            found: &[
                "eu|notice|not fenced, with the very columns of s.orders: a detached partition?",
            ],
            write: "UPDATE eu SET v = 33, fence = :old",
            ..TREE
        },
    ])
}

#[lab_test]
fn a_fence_on_one_partition_only_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        built: "SELECT fence_unprotect('orders'); INSERT INTO us VALUES (2, 34, :new, 'us'); \
                CREATE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON eu \
                    FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'monotonic', 'order:{id}')",
        found: &["orders|hole|no trigger of pg_fence is on this table"],
        found_in_all: Some(&[
            "eu|notice|TRUNCATE not fenced",
            "eu|hole|only this partition of s.orders is fenced: rows can move around its fence",
        ]),
        write: "INSERT INTO us (id, region, fence) VALUES (2, 'us', :old)",
        after: "PF004",
        ..TREE
    }])
}

#[lab_test]
fn a_partition_of_another_owner_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        by_admin: true,
        built: "ALTER TABLE eu OWNER TO :writer",
        found: &[
            "eu|notice|its owner :writer is not that of s.orders, and may take its triggers off",
        ],
        write: "ALTER TABLE eu DISABLE TRIGGER fenced; UPDATE eu SET v = 33, fence = :old",
        after: "42501",
        ..TREE
    }])
}

const BARE_CHILD: &[&str] =
    &["child|hole|INSERT, UPDATE, DELETE not fenced", "child|notice|TRUNCATE not fenced"];

#[lab_test]
fn a_child_without_a_fence_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "CREATE TABLE child (more text) INHERITS (orders); INSERT INTO child VALUES (2, 0)",
            found: BARE_CHILD,
            write: "UPDATE orders SET v = 33 WHERE id = 2",
            after: "PF002",
            ..HOLE
        },
        Hole {
            fence: ", lease => 'order:{id}', always => true",
            built: "CREATE TABLE child () INHERITS (orders); INSERT INTO child VALUES (2, 0, 1); \
                    CREATE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON child FOR EACH ROW \
                        EXECUTE FUNCTION fenced('fence', 'monotonic', 'order:{id}')",
            found: &[
                r#"child|notice|trigger "fenced" does not fire for apply workers, as that of s.orders does"#,
                "child|notice|TRUNCATE not fenced",
            ],
            write: "UPDATE child SET v = 33",
            before: "PF002",
            after: "PF002",
            ..HOLE
        },
        Hole {
            fence: ", always => true, verify => true",
            built: "CREATE TABLE child () INHERITS (orders); CREATE TABLE grandchild () INHERITS (child); \
                    INSERT INTO grandchild VALUES (2, 0)",
            found: &[
                "child|hole|UPDATE, DELETE not fenced",
                "child|notice|TRUNCATE not fenced",
                "grandchild|hole|UPDATE, DELETE not fenced",
                "grandchild|notice|TRUNCATE not fenced",
            ],
            write: "DELETE FROM grandchild",
            after: "PF002",
            ..HOLE
        },
    ])
}

#[lab_test]
fn what_is_wrong_with_a_child_is_found(lab: &Lab) -> Result<()> {
    const CHILD: &str = "CREATE TABLE child () INHERITS (orders); INSERT INTO child VALUES (2, 34, 1); \
                         DO $$ DECLARE r text; BEGIN \
                             FOR r IN SELECT remedy FROM fence_audit('orders') WHERE relation <> 'orders'::regclass LOOP EXECUTE r; END LOOP; END $$;";
    let mut audited = AuditedDatabase::new(lab)?;
    for (fence, arguments, unbound) in
        [("", "'fence', 'strict'", "PF001"), (BOUND, "'fence', 'monotonic', 'order:{id}'", "PF004")]
    {
        for (built, found, write, after) in [
            (
                "ALTER TABLE child DISABLE TRIGGER fenced",
                r#"child|hole|trigger "fenced" is disabled"#,
                "UPDATE child SET v = 33",
                "PF002",
            ),
            (
                "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OF fence OR DELETE ON child \
                     FOR EACH ROW EXECUTE FUNCTION fenced(:arguments)",
                r#"child|hole|trigger "fenced" has a WHEN clause or a list of columns, and skips some writes"#,
                "UPDATE child SET v = 33",
                "PF002",
            ),
            (
                "CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                     'BEGIN NEW.fence := NULL; RETURN NEW; END'; \
                 CREATE TRIGGER zz BEFORE UPDATE ON child FOR EACH ROW EXECUTE FUNCTION low()",
                r#"child|hole|trigger "zz" runs after the fence and may change what it has judged"#,
                "UPDATE child SET v = 33, fence = lease_acquire('order:2')",
                "PF002",
            ),
            (
                "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON child \
                     FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'monotonic')",
                r#"child|hole|trigger "fenced" judges by other arguments than the fence of s.orders"#,
                "UPDATE child SET v = 33, fence = 1",
                unbound,
            ),
            (
                "ALTER TABLE child ALTER fence SET DEFAULT 1",
                r#"child|hole|the fence column "fence" has a default, which passes for a token"#,
                "INSERT INTO child (id) VALUES (3)",
                "",
            ),
        ] {
            // Without a lease an INSERT presents nothing and is not judged.
            let default = after.is_empty();
            let free = default && fence.is_empty();
            audited.close_all(&[Hole {
                fence,
                built: &format!("{CHILD} {}", built.replace(":arguments", arguments)),
                found: &[found],
                write,
                before: if default && !free { "PF004" } else { LANDS },
                after: match after {
                    "" if free => LANDS,
                    "" => "PF002",
                    after => after,
                },
                ..HOLE
            }])?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_foreign_table_is_found(lab: &Lab) -> Result<()> {
    const FOREIGN: &[&str] =
        &["abroad|hole|this table is foreign: nothing fences it on its own server"];
    let mut audited = AuditedDatabase::new(lab)?;
    audited.admin.run(
        "CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing",
    )?;
    let hole = Hole {
        by_admin: true,
        found: FOREIGN,
        write: "UPDATE ONLY orders SET v = 33, fence = :old",
        before: "PF001",
        after: "PF001",
        ..HOLE
    };
    audited.close_all(&[
        Hole {
            table: TABLE,
            built: "CREATE FOREIGN TABLE abroad PARTITION OF orders FOR VALUES IN ('mars') SERVER nowhere; \
                    ALTER FOREIGN TABLE abroad OWNER TO :owner",
            write: "UPDATE eu SET v = 33, fence = :old",
            ..hole
        },
        Hole {
            built: "CREATE FOREIGN TABLE abroad () INHERITS (orders) SERVER nowhere; \
                    ALTER FOREIGN TABLE abroad OWNER TO :owner",
            ..hole
        },
        // One that hangs below no fenced table: only the audit of everything comes upon it.
        Hole {
            built: "CREATE FOREIGN TABLE abroad (id int, v int, fence bigint) SERVER nowhere; \
                    ALTER FOREIGN TABLE abroad OWNER TO :owner; \
                    CREATE TRIGGER fenced BEFORE UPDATE OR DELETE ON abroad FOR EACH ROW EXECUTE FUNCTION fenced()",
            found: &[],
            found_in_all: Some(FOREIGN),
            ..hole
        },
    ])
}
