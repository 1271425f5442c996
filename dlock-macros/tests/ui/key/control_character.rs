use dlock_core::key;

fn main() {
    let id = 7;
    let _ = key!("order\n{id}");
}
