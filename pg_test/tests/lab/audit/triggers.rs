//! `fence_audit` on the triggers: ours that do not fire, others that fire after them.

use crate::support::holes::{AuditedDatabase, Hole, BOUND, HOLE};
use pg_test::{lab_test, Lab, Result};

#[lab_test]
fn a_trigger_that_does_not_fire_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "ALTER TABLE orders DISABLE TRIGGER fenced",
            found: &[r#"orders|hole|trigger "fenced" is disabled"#],
            ..HOLE
        },
        Hole {
            fence: ", lease => 'order:{id}', always => true",
            built: "ALTER TABLE orders DISABLE TRIGGER USER",
            found: &[
                r#"orders|hole|trigger "fenced" is disabled"#,
                r#"orders|hole|trigger "fenced_truncate" is disabled"#,
            ],
            ..HOLE
        },
        Hole {
            built: "ALTER TABLE orders ENABLE REPLICA TRIGGER fenced",
            found: &[r#"orders|hole|trigger "fenced" fires for apply workers only"#],
            ..HOLE
        },
        Hole {
            built: "ALTER TABLE orders DISABLE TRIGGER fenced_truncate; GRANT TRUNCATE ON orders TO :writer",
            found: &[
                r#"orders|hole|trigger "fenced_truncate" is disabled"#,
                "orders|notice|:writer may TRUNCATE; only the trigger stands in the way",
            ],
            write: "TRUNCATE orders",
            after: "42501",
            ..HOLE
        },
        Hole {
            built: "SELECT fence_unprotect('orders')",
            found: &["orders|hole|no trigger of pg_fence is on this table"],
            found_in_all: Some(&[
                "orders|notice|no trigger of pg_fence is on this table, which was fenced (if it was bound to a lease, bind it again)",
            ]),
            ..HOLE
        },
        Hole {
            built: "DROP TRIGGER fenced ON orders",
            found: &["orders|hole|INSERT, UPDATE, DELETE not fenced"],
            ..HOLE
        },
        Hole {
            fence: ", lease => 'order:{id}', verify => true",
            built: "ALTER TABLE orders DISABLE TRIGGER fenced_verify; \
                    CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                        'BEGIN NEW.fence := :old; RETURN NEW; END'; \
                    CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION low()",
            found: &[r#"orders|hole|trigger "fenced_verify" is disabled"#],
            write: "UPDATE orders SET v = 35, fence = :new",
            ..HOLE
        },
    ])
}

#[lab_test]
fn a_trigger_that_skips_writes_is_found(lab: &Lab) -> Result<()> {
    const SKIPS: &[&str] = &[
        r#"orders|hole|trigger "fenced" has a WHEN clause or a list of columns, and skips some writes"#,
    ];
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW \
                        WHEN (current_user = 'root') EXECUTE FUNCTION fenced('fence', 'monotonic', 'order:{id}')",
            found: SKIPS,
            ..HOLE
        },
        Hole {
            built: "CREATE OR REPLACE TRIGGER fenced BEFORE INSERT OR UPDATE OF fence OR DELETE ON orders FOR EACH ROW \
                        EXECUTE FUNCTION fenced('fence', 'monotonic', 'order:{id}')",
            found: SKIPS,
            write: "UPDATE orders SET v = 33",
            after: "PF002",
            ..HOLE
        },
    ])
}

#[lab_test]
fn an_event_without_its_trigger_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "SELECT fence_protect('orders', lease => 'order:{id}', events => 'update,delete,truncate')",
            found: &["orders|hole|INSERT not fenced"],
            write: "INSERT INTO orders VALUES (2, 33, :old)",
            after: "PF004",
            ..HOLE
        },
        Hole {
            built: "SELECT fence_protect('orders', lease => 'order:{id}', events => 'update')",
            found: &[
                "orders|hole|INSERT, DELETE not fenced",
                "orders|notice|TRUNCATE not fenced",
            ],
            write: "DELETE FROM orders",
            after: "PF002",
            ..HOLE
        },
        // By hand, with names that give away nothing.
        Hole {
            built: "SELECT fence_unprotect('orders'); CREATE TRIGGER guard BEFORE UPDATE ON orders \
                        FOR EACH ROW EXECUTE FUNCTION fenced('fence', 'strict', 'order:{id}')",
            found: &[
                "orders|hole|INSERT, DELETE not fenced",
                "orders|notice|TRUNCATE not fenced",
            ],
            write: "SET LOCAL pg_fence.token = ':old'; DELETE FROM orders",
            ..HOLE
        },
        Hole {
            fence: "",
            built: "SELECT fence_protect('orders', events => 'update,truncate')",
            found: &["orders|hole|DELETE not fenced"],
            write: "DELETE FROM orders",
            after: "PF002",
            ..HOLE
        },
        Hole {
            fence: "",
            built: "SELECT fence_protect('orders', events => 'delete')",
            found: &["orders|hole|UPDATE not fenced", "orders|notice|TRUNCATE not fenced"],
            ..HOLE
        },
        // Two of ours, of which one knows nothing of the lease.
        Hole {
            built: "SELECT fence_protect('orders', lease => 'order:{id}', events => 'insert,update,truncate'); \
                    CREATE TRIGGER a BEFORE DELETE ON orders FOR EACH ROW EXECUTE FUNCTION fenced()",
            found: &[r#"orders|hole|trigger "a" judges by other arguments than the fence of s.orders"#],
            write: "SELECT set_config('pg_fence.token', lease_acquire('another')::text, true); \
                    DELETE FROM orders",
            after: "PF004",
            ..HOLE
        },
        Hole {
            built: "DROP TRIGGER fenced_truncate ON orders; GRANT TRUNCATE ON orders TO PUBLIC",
            found: &[
                "orders|notice|TRUNCATE not fenced",
                "orders|hole|PUBLIC may TRUNCATE; nothing stands in the way",
            ],
            write: "TRUNCATE orders",
            after: "42501",
            ..HOLE
        },
        Hole {
            fence: "",
            built: "SELECT fence_protect('orders', mode => 'monotonic')",
            found: &["orders|hole|monotonic without a lease: a client that writes every column back \
                      passes with the token it read"],
            write: "UPDATE orders SET id = 1, v = 33, fence = :new",
            ..HOLE
        },
    ])
}

/// A function for triggers that puts an older token into the row.
const LOW: &str = "CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                       'BEGIN NEW.fence := :old; RETURN NEW; END'; \
                   CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION low()";
const LATER: &str =
    r#"orders|hole|trigger "zz" runs after the fence and may change what it has judged"#;

#[lab_test]
fn a_later_trigger_is_found(lab: &Lab) -> Result<()> {
    let holes = ["", BOUND, ", lease => 'order:{id}', always => true"].map(|fence| Hole {
        fence,
        built: LOW,
        found: &[LATER],
        write: "UPDATE orders SET v = 35, fence = lease_renew('order:1', :new)",
        ..HOLE
    });
    AuditedDatabase::new(lab)?.close_all(&holes)
}

#[lab_test]
fn a_subscription_that_no_trigger_sees_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    let name =
        "s_".to_owned() + &audited.admin.text("SELECT current_database()")?.unwrap_or_default();
    audited.admin.run(&format!(
        "CREATE SUBSCRIPTION {name} CONNECTION 'dbname=nowhere' PUBLICATION p \
         WITH (connect = false, slot_name = NONE)"
    ))?;
    let outcome = audited.close_all(&[Hole {
        by_admin: true,
        built: "INSERT INTO pg_subscription_rel SELECT max(oid), 's.orders'::regclass, 'r', NULL FROM pg_subscription",
        found: &[
            r#"orders|notice|a subscription writes here, and trigger "fenced" does not fire for it"#,
        ],
        write: "SELECT 1",
        before: "no effect",
        after: "no effect",
        ..HOLE
    }]);
    // It belongs to the whole server, and its database could not be dropped.
    audited.admin.run(&format!("DROP SUBSCRIPTION {name}"))?;
    outcome
}
