use dlock_core::key;

fn main() {
    let order = 7;
    let _ = key!("{order:id}");
}
