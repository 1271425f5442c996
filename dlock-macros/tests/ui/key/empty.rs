use dlock_core::key;

fn main() {
    let _ = key!("");
}
