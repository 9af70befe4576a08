//! `fence_audit` on who has been let near the table: privileges, members of the owner, foreign keys.

use crate::holes::{Hole, Scene, HOLE, LANDS};
use pg_test::{Lab, Result};

pg_test::trials![
    who_may_truncate_is_found,
    who_may_create_a_trigger_is_found,
    a_right_passed_on_is_found,
    a_member_of_the_owner_is_found,
    a_foreign_key_that_writes_is_found,
];

fn who_may_truncate_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole { write: "TRUNCATE orders", after: "42501", ..HOLE };
    Scene::new(lab)?.close_all(&[
        Hole {
            built: "GRANT TRUNCATE ON orders TO :writer",
            found: &["orders|notice|:writer may TRUNCATE; only the trigger stands in the way"],
            before: "PF005",
            ..hole
        },
        Hole {
            built: "GRANT TRUNCATE ON orders TO PUBLIC; DROP TRIGGER fenced_truncate ON orders",
            found: &[
                "orders|notice|TRUNCATE not fenced",
                "orders|hole|PUBLIC may TRUNCATE; nothing stands in the way",
            ],
            ..hole
        },
    ])
}

fn who_may_create_a_trigger_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole {
        built: "GRANT TRIGGER ON orders TO :writer",
        write: "CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS \
                    'BEGIN NEW.fence := :old; RETURN NEW; END'; \
                CREATE TRIGGER zz BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION low(); \
                UPDATE orders SET v = 33, fence = lease_renew('order:1', :new)",
        after: "42501",
        ..HOLE
    };
    Scene::new(lab)?.close_all(&[
        Hole {
            found: &["orders|hole|:writer may create a trigger that runs after the fence"],
            ..hole
        },
        Hole {
            fence: ", lease => 'order:{id}', verify => true",
            found: &["orders|notice|:writer may create a trigger that runs after the fence"],
            before: "PF001",
            ..hole
        },
    ])
}

fn a_right_passed_on_is_found(lab: &Lab) -> Result<()> {
    Scene::new(lab)?.close_all(&[Hole {
        by_admin: true,
        built: "GRANT TRUNCATE ON orders TO :writer WITH GRANT OPTION; \
                SET ROLE :writer; GRANT TRUNCATE ON orders TO PUBLIC; RESET ROLE",
        found: &[
            "orders|notice|:writer may TRUNCATE; only the trigger stands in the way",
            "orders|notice|PUBLIC may TRUNCATE; only the trigger stands in the way",
        ],
        write: "TRUNCATE orders",
        before: "PF005",
        after: "42501",
        ..HOLE
    }])
}

fn a_member_of_the_owner_is_found(lab: &Lab) -> Result<()> {
    Scene::new(lab)?.close_all(&[Hole {
        by_admin: true,
        built: "GRANT :owner TO :writer",
        found: &["orders|notice|:writer is a member of the owner, and may take the fence off"],
        write: "SELECT fence_unprotect('orders'); UPDATE orders SET v = 33",
        after: "42501",
        ..HOLE
    }])
}

fn a_foreign_key_that_writes_is_found(lab: &Lab) -> Result<()> {
    const TABLE: &str =
        "CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1), (9); \
         CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint, parent int DEFAULT 1)";
    const DELETE: &str = "DELETE FROM parent WHERE id = 1";
    const UPDATE: &str = "UPDATE parent SET id = 2 WHERE id = 1";
    let mut scene = Scene::new(lab)?;
    for (action, events, write) in [
        ("ON DELETE CASCADE", "update,delete,truncate", DELETE),
        ("ON DELETE CASCADE", "update,truncate", DELETE),
        ("ON DELETE SET NULL", "update,delete,truncate", DELETE),
        ("ON DELETE SET NULL (parent)", "delete,truncate", DELETE),
        ("ON DELETE SET DEFAULT", "delete,truncate", DELETE),
        ("ON UPDATE CASCADE ON DELETE NO ACTION DEFERRABLE", "delete,truncate", UPDATE),
        ("ON UPDATE SET NULL", "update,delete,truncate", UPDATE),
        ("ON UPDATE CASCADE ON DELETE CASCADE", "update,delete,truncate", UPDATE),
        ("MATCH FULL ON UPDATE CASCADE ON DELETE CASCADE NOT VALID", "update,truncate", DELETE),
    ] {
        let missing = match events {
            "update,truncate" => Some("orders|hole|DELETE not fenced"),
            "delete,truncate" => Some("orders|hole|UPDATE not fenced"),
            _ => None,
        };
        let severity = if missing.is_some() { "hole" } else { "notice" };
        let key = format!(
            "orders|{severity}|foreign key \"The key\" writes here when a row of s.parent changes"
        );
        let found: Vec<&str> = missing.into_iter().chain([&*key]).collect();
        scene.close_all(&[Hole {
            table: TABLE,
            fence: "",
            built: &format!(
                "ALTER TABLE orders ADD CONSTRAINT \"The key\" FOREIGN KEY (parent) REFERENCES parent {action}; \
                 ALTER TABLE orders ALTER parent SET DEFAULT 9; \
                 SELECT fence_protect('orders', events => '{events}')"
            ),
            found: &found,
            write,
            before: if missing.is_some() { LANDS } else { "PF002" },
            after: "23503",
            ..HOLE
        }])?;
    }
    Ok(())
}
